"""What has the form of a cluster's address, and what has not."""

from __future__ import annotations

import pytest

from qfleet.config.validation import check_address
from qfleet.core.errors import ConfigError
from support.messages import says


@pytest.mark.parametrize(
    "address",
    [
        "auto",
        "10.0.0.1:6379",
        "localhost:1",
        "head-node.example.org:65535",
        "[::1]:6379",
        "[fe80::1%eth0]:6379",
    ],
)
def test_addresses_pass(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:99999",
        "127.0.0.1:65536",
        "127.0.0.1:0",
        "127.0.0.1:-1",
        "127.0.0.1:",
        "127.0.0.1:٦٣٧٩",
        "127.0.0.1:6379 ",
        "127.0.0.1",
        ":6379",
        " :6379",
        "[]:6379",
        "::1:6379",
        "ray://10.0.0.1:10001",
        "Auto",
        "",
    ],
)
def test_what_is_no_address_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(ConfigError, match=says("address", repr(address), "host:port")) as caught:
        check_address(address)
    assert str(caught.value).isprintable()
