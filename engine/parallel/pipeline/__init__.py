"""Pipeline parallelism.

``execution`` runs a step, ``schedule`` orders its work, ``stages`` knows which stage holds what, ``p2p`` sends.
"""
