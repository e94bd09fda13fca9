"""Fixtures of the tests of object stores."""

from tests.stores.servers import gcs_server, gs_url, s3_server, s3_url

__all__ = ["gcs_server", "gs_url", "s3_server", "s3_url"]
