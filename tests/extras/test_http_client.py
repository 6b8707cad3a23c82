"""What an HTTP client shows of an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retrain.base.http_client import CallError, HttpClient, read_json


@pytest.fixture(scope="module")
def client() -> Iterator[HttpClient]:
    opened = HttpClient("http://127.0.0.1:9", key="s3cret" * 4, timeout_s=1.0, extra="judge", who="judge")
    yield opened
    opened.close()


@pytest.mark.parametrize("before", range(60, 85))
def test_no_part_of_a_key_is_left_at_the_end_of_an_excerpt(client: HttpClient, before: int) -> None:
    with pytest.raises(CallError, match="not JSON") as raised:
        read_json(b"." * before + b"s3cret" * 4, client.masked)
    assert "s3c" not in str(raised.value)
