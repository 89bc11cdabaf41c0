"""Ape-X: many actors in processes of their own, a replay memory in shards, one learner.

messages      what passes between the processes
letters       blocks of rows in, messages out, and back
priorities    blocks in, how surprising their transitions are out
remote_actor  lives in a process: weights in; letters, with first priorities, and episodes out
shard         lives in a process: letters in, samples out, of the rings of some of the actors
shares        masses of many rings in; how many samples of each, and their importance weights out
replay        the shards as one ``Memory``, on the learner's side
broadcast     the newest weights, stored once for all actors
fleet         the actors as one collector, on the learner's side
account       what all of them did and cost
building      Config in, parts of a run out

The first six know nothing of processes. Whoever calls them, calls one method at a time.
"""
