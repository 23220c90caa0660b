"""A release newer than the newest tried is one log line."""

import logging

import pytest

from echelon.cluster import releases


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that are installed instead; others are absent."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(releases, "installed_release", versions.get)
    releases.log_newer_releases.cache_clear()
    return versions


def test_newer_releases_are_one_line_that_names_the_check(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed |= {"torch": "99.1.0+cpu", "transformers": "6.0.0.dev0", "peft": releases.NEWEST_TRIED["peft"]}
    with caplog.at_level(logging.WARNING, "echelon"):
        for _ in range(2):
            releases.log_newer_releases()
    (line,) = caplog.messages
    assert "torch 99.1.0+cpu (tried up to " in line and "transformers 6.0.0.dev0 (tried" in line
    assert "peft" not in line and "echelon verify" in line


def test_releases_that_were_tried_older_ones_and_absent_packages_are_no_line(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed |= {"torch": releases.NEWEST_TRIED["torch"] + "+cu130", "transformers": "5.9.0"}
    releases.log_newer_releases()
    assert caplog.messages == [] and releases.newer_releases() == {}


@pytest.mark.parametrize(
    ("newer", "older"),
    [("2.15.0", "2.14.1"), ("5.10.0", "5.9.9"), ("2.14.1.1", "2.14.1"), ("3.0", "2.99+cpu")],
)
def test_releases_are_compared_as_numbers(newer: str, older: str) -> None:
    assert releases._numbers(newer) > releases._numbers(older)
