"""An S3 server (moto) that is slow on purpose, and prints the objects sent to it.

    .venv-stores/bin/python -m scripts.faults.s3_server --delay-s 0.2

Prints its port, then `PUT <name>` when an object of a step begins to arrive. It waits
`--delay-s` before it accepts the object. It has one bucket, named `bucket`.
"""

import argparse
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-s", type=float, default=0.0)
    delay_s = parser.parse_args(argv).delay_s
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto: Any = importlib.import_module("moto.server")
    serving: Any = importlib.import_module("werkzeug.serving")
    app = moto.DomainDispatcherApplication(moto.create_backend_app)

    def slow(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        name = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and name.count("/") > 2:
            print("PUT", name.removeprefix(f"/{BUCKET}/"), flush=True)
            time.sleep(delay_s)
        return app(environ, start)

    server = serving.make_server("127.0.0.1", 0, slow, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    boto3: Any = importlib.import_module("boto3")
    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name=CREDENTIALS["AWS_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    ).create_bucket(Bucket=BUCKET)
    print(server.port, flush=True)
    thread.join()


if __name__ == "__main__":
    main()
