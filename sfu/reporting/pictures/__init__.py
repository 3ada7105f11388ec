"""Pictures of results: bars, curves over a swept number, the distance-accuracy plane, and trade-off paths.

Nothing here touches pyplot or its global state, and matplotlib is imported only when something is drawn.
"""
