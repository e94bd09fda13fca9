"""Objects in buckets: `s3://BUCKET/PREFIX` and `gs://BUCKET/PREFIX`."""
