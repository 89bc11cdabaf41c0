"""What died with a server, from what its workers and its snapshot know."""

from __future__ import annotations

from qfleet.engines.parameter_server.ledger import Ledger


def test_what_was_sent_after_the_snapshot_is_lost() -> None:
    ledger = Ledger()
    ledger.record_sent(0, {0: 12})
    ledger.record_sent(1, {0: 7})
    assert ledger.lost == 0
    ledger.restored(0, {0: 10, 1: 7})
    assert ledger.lost == 2


def test_news_may_come_after_the_restore_and_in_any_order() -> None:
    ledger = Ledger()
    ledger.restored(0, {0: 10})
    ledger.record_sent(0, {0: 13, 1: 11})
    ledger.record_sent(0, {0: 12})  # what a server said of it earlier
    ledger.record_sent(1, {0: 4})  # one that the snapshot does not know at all
    assert ledger.lost == 3 + 4


def test_a_snapshot_may_know_more_than_a_worker_was_told() -> None:
    ledger = Ledger()
    ledger.record_sent(0, {0: 5})
    ledger.restored(0, {0: 6})
    assert ledger.lost == 0


def test_every_epoch_counts_from_what_it_began_with() -> None:
    ledger = Ledger()
    ledger.record_sent(0, {0: 10})
    ledger.restored(0, {0: 8})  # 2 lost
    ledger.record_sent(0, {1: 11})
    ledger.restored(1, {0: 8})  # the same snapshot again: 3 more
    ledger.record_sent(0, {2: 20})
    assert ledger.lost == 5
