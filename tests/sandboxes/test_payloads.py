"""The battery covers what it claims to, and names each payload once."""

from tests.sandboxes.payloads import ANYWHERE, PAYLOADS


def test_the_battery_has_its_five_groups() -> None:
    groups = [payload.group for payload in PAYLOADS]
    assert set(groups) == {"exhaustion", "escape", "forgery", "persistence", "files"}
    assert len({payload.name for payload in PAYLOADS}) == len(PAYLOADS) >= 60


def test_the_unsafe_sandbox_is_in_the_battery_only_where_it_says_so() -> None:
    groups = {payload.group for payload in PAYLOADS if payload.kinds == ANYWHERE}
    assert groups
    assert "escape" not in groups
