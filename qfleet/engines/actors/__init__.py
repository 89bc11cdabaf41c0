"""Ape-X: many actors in processes of their own, a replay memory in shards, one learner.

messages        what passes between the processes
block_messages  blocks of rows in, messages ("letters") out, and back
priorities      blocks in, first priorities of their transitions out
remote_actor    in a process: weights in; letters, with first priorities, and episodes out
shard           in a process: letters in, samples out, of the rings of some of the actors
shares          masses of many rings in; samples per ring and their importance weights out
replay          the shards as one ``Memory``, on the learner's side
broadcast       the newest weights, stored once for all actors
fleet           the actors as one collector, on the learner's side
account         what all of them did and cost
building        Config in, parts of a run out

The first six know nothing of other processes: their methods are called one at a time.
"""
