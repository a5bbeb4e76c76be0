"""`pytest tests/models -k mixtral` runs everything of that family: its tests lose the mark `slow`."""

import pytest

from labkit.parity.conformance.sources import NAMED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before marks are looked at. A name that is part of others (`gemma`) takes its own slow tests and the others' quick ones."""
    family = config.option.keyword
    for item in items if family in NAMED else ():
        if getattr(item, "callspec", None) is not None and item.callspec.params.get("family") == family:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
