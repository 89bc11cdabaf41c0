"""Ape-X: many actors in processes of their own, a replay memory in shards, one learner.

engine          builds the parts of a run and advances its loop
messages        orders, reports and replies between the processes
block_messages  a block of rows as one message
priorities      the first priorities of new transitions
remote_actor    an actor in a process of its own
shard           a replay shard in a process of its own: the rings of some of the actors
shares          how many samples each ring gives, and their importance weights
replay          the shards as one ``Memory``, on the learner's side
broadcast       the newest weights, stored once for all actors
fleet           the actors as one collector, on the learner's side
account         time, traffic and faults of all processes
"""
