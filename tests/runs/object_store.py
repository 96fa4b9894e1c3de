"""An object store on this machine that speaks S3: moto's server, which ``s3fs`` talks to."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator

import pytest

NEEDED = "s3fs, moto[s3], flask and flask-cors"


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """The URL of an empty bucket; also processes that are started meanwhile reach it."""
    if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
        for package in ("s3fs", "moto", "flask", "flask_cors"):
            pytest.importorskip(package, reason=f"a local object store needs {NEEDED}")
    # Imported here because it takes two seconds, and is no package that everybody has.
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        S3FileSystem.clear_instance_cache()  # another test's server
        bucket = f"bucket-{uuid.uuid4()}"  # all servers of a process have the same buckets
        S3FileSystem().mkdir(bucket)
        try:
            yield f"s3://{bucket}"
        finally:
            S3FileSystem.clear_instance_cache()
            server.stop()
