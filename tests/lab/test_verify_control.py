"""What phase 4 says of its control: an example of what loose limits let pass beside a port that passed, and nothing of the kind beside one that failed."""

from types import SimpleNamespace

import pytest

from labkit.lab.phases.verify import Verify


def said(passed: bool) -> tuple[list[str], str]:
    """(pitfalls, the section) of the control of a result whose port passed or did not."""
    control = {"change": "rms_norm_eps 1e-06 -> 1e-05", "passed": False, "rel_error": 6.7e-4, "max_kl": 1e-6, "length": 64}
    result = {"control": control, "limit": 1e-9, "max_rel_error": 1e-14 if passed else 4.9e-5, "passed": passed}
    pitfalls: list[str] = []
    phase = SimpleNamespace(exact={"subset": result}, gate=lambda *a, **k: None, pitfall=pitfalls.append)
    return pitfalls, Verify.control.__wrapped__(phase).plain()


@pytest.mark.parametrize("passed", [True, False])
def test_only_a_port_that_passed_is_set_against_the_control(passed):
    pitfalls, shown = said(passed)
    assert len(pitfalls) == passed and all("this port 1.0e-14" in text for text in pitfalls)
    assert "right port" not in shown + "".join(pitfalls) and "this port" in shown
