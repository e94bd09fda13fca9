"""A model with a tokenizer by name: exported, and opened to generate or evaluate."""

import dataclasses
import json

import pytest

from mjax.data.hub_tokenizers import SPEC
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import train_bpe
from mjax.generate.opened import open_model
from mjax.run.export import Wanted, export
from tests.data.hub_server import COMMIT, NEXT, serving
from tests.hugging_face.saved_runs import make_run, small_config
from tests.training import make_mesh

MAIN, PINNED = "hf://org/model@main", f"hf://org/model@{COMMIT}"
TEXT = "the then them thesis, the quick brown fox\n" * 3


def spec(text: str) -> dict[str, bytes]:
    return {"tokenizer.json": train_bpe([text], 262).encode()}


def test_a_run_is_exported_and_opened_with_the_commit_that_its_config_has(
    tmp_path, monkeypatch
):
    with serving(tmp_path / "hub", monkeypatch) as hub:
        hub.model_files = spec(TEXT)
        digest = read_files(MAIN).digest
        config = small_config(MAIN, 262)
        data = dataclasses.replace(config.data, tokenizer=PINNED)
        config = dataclasses.replace(config, data=data)
        run = make_run(tmp_path / "run", config, None, tokenizer_digest=digest)
        hub.commit, hub.model_files = NEXT, spec(TEXT[::-1])

        out = str(tmp_path / "out")
        export(str(run), out, None, Wanted())
        # The same tokens; the exported tokenizer also adds the start token.
        written, given = (read_files(x).contents[SPEC] for x in (out, PINNED))
        assert json.loads(written)["model"] == json.loads(given)["model"]
        export(str(run), str(tmp_path / "given"), None, Wanted(tokenizer=PINNED))
        mesh = make_mesh((1, 1, 1, 1))
        for path, given in ((str(run), None), (str(run), PINNED), (out, PINNED)):
            opened = open_model(path, mesh, dtype="float32", tokenizer=given)
            assert opened.tokenizer.digest == digest

        with pytest.raises(ValueError, match="is not that of the run: digest"):
            export(str(run), str(tmp_path / "other"), None, Wanted(tokenizer=MAIN))
        with pytest.raises(ValueError, match="the tokenizer is not that of"):
            open_model(str(run), mesh, dtype="float32", tokenizer=MAIN)
        hub.status = 503
        with pytest.raises(
            ValueError, match=r"^--tokenizer hf://org/model@v2: the hub"
        ):
            open_model(out, mesh, dtype="float32", tokenizer="hf://org/model@v2")
