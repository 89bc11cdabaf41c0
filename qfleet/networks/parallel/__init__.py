"""One network over several ranks. docs/model-parallel.md explains it.

``layout`` says which part of each parameter a rank holds. ``tensor`` replaces the layers of a built
network by parts of them, with the exchanges of ``collectives``; ``stages`` keeps some of its layers
only; ``split`` does both. Network classes do not know about ranks.
"""
