"""Where requests go: to their prefix, unless another engine has much less to do."""

from __future__ import annotations

from agentrl.engines.routing import SIBLINGS, Router


def place(router: Router[str], rollout: str, group: str, tokens: int = 100) -> str:
    slot = router.choose(router.slots, rollout, group, tokens)
    router.begin(slot, tokens)
    return slot


def test_a_rollout_stays_where_its_history_is_cached_however_loaded_that_is() -> None:
    router = Router(["a", "b"])
    home = place(router, "r", "g", 1000)
    for i in range(50):
        router.begin(home, 1000)
        assert router.choose(router.slots, "r", f"other-{i}", 1) == home


def test_siblings_of_a_group_go_to_one_engine() -> None:
    router = Router(["a", "b", "c"])
    assert len({place(router, f"r{i}", "g") for i in range(8)}) == 1


def test_groups_are_shared_out_by_outstanding_tokens() -> None:
    router = Router(["a", "b"])
    for group in range(8):
        for member in range(4):
            place(router, f"{group}-{member}", f"{group}")
    assert router.outstanding("a") == router.outstanding("b") == 1600


def test_a_group_overflows_when_its_engine_is_far_ahead() -> None:
    router = Router(["a", "b"])
    slots = [place(router, f"r{i}", "g") for i in range(3 * SIBLINGS)]
    assert set(slots[:SIBLINGS]) == {slots[0]}
    assert set(slots) == {"a", "b"}


def test_ended_requests_no_longer_weigh() -> None:
    router = Router(["a", "b"])
    slot = place(router, "r", "g", 500)
    router.end(slot, 500)
    assert router.outstanding(slot) == 0


def test_a_rollout_whose_engine_is_gone_moves_and_stays_there() -> None:
    router = Router(["a", "b"])
    first = place(router, "r", "g")
    (other,) = {"a", "b"} - {first}
    assert router.choose([other], "r", "g", 1) == other
    assert router.choose(router.slots, "r", "g", 1) == other
