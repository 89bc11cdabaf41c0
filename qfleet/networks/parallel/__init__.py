"""One network over several ranks. docs/model-parallel.md explains it.

``layout`` says which part of each parameter a rank holds, ``collectives`` are the exchanges of a
forward and a backward pass, and ``tensor`` replaces the layers of a built network by their parts.
Network classes do not know about ranks.
"""
