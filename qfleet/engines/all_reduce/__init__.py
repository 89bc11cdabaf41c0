"""The all-reduce engine: every rank collects and learns, and gradients are averaged.

``world`` finds or starts the ranks, ``group`` connects them and notices when one is lost,
``messages`` carries states between them. ``rank`` builds the parts of one rank: the loop of the
serial engine with ``updater`` and ``replay``, which average over all ranks. ``engine`` is rank 0,
which has the run's folder; ``follower`` is every other rank. ``mesh``, ``inference`` and
``split_model`` are for networks that are split among ranks. docs/all-reduce.md and
docs/model-parallel.md explain it.
"""
