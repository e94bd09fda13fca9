"""URLs of object stores."""

import importlib.util

import pytest

from mjax.stores import address, opened


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "prefix"),
    [
        ("s3://bucket/a/b", "s3", "bucket", "a/b"),
        ("gs://my_bucket.example/a/", "gs", "my_bucket.example", "a"),
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
    ],
)
def test_a_url_has_a_bucket_and_a_prefix(text, scheme, bucket, prefix):
    found = address.parse(text, "--flag")
    assert (found.scheme, found.bucket, found.prefix) == (scheme, bucket, prefix)
    assert found.url == text.rstrip("/")
    assert address.parse(found.url, "--flag") == found


def test_a_child_is_below_its_address():
    assert address.parse("s3://bucket", "").child("a").url == "s3://bucket/a"
    assert address.parse("s3://bucket/a", "").child("b/c").url == "s3://bucket/a/b/c"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be s3://BUCKET/PREFIX"),
        ("runs/a", "must be s3://BUCKET/PREFIX"),
        ("http://host/a", "must be s3://BUCKET/PREFIX"),
        ("s3://", "is not the name of a bucket"),
        ("s3:///a", "is not the name of a bucket"),
        ("s3://Bucket/a", "'Bucket' is not the name of a bucket"),
        ("s3://user@host/a", "is not the name of a bucket"),
        ("gs://bucket/a//b", "empty part"),
        ("gs://bucket//a", "empty part"),
        ("gs://bucket/../a", "empty part, '.' or '..'"),
        ("s3://bucket/a?versionId=1", "one of ? #"),
        ("s3://bucket/a\nb", "cannot be printed"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused(text, reason):
    with pytest.raises(ValueError, match="--flag") as caught:
        address.parse(text, "--flag")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_url"), [("s3://a", True), ("gs://a", True), ("hf://a", False)]
)
def test_only_s3_and_gs_are_object_stores(text, is_url):
    assert address.is_url(text) == is_url


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_without_the_extra_the_flag_is_refused(scheme, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    place = address.parse(f"{scheme}://bucket/run", "--flag")
    with pytest.raises(
        ValueError, match=f"--flag {scheme}://bucket/run needs"
    ) as caught:
        opened.open_store(place, "--flag")
    assert f"pip install 'mjax[{scheme}]'" in str(caught.value)
