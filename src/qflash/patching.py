"""Placeholder replaced below."""
def patch(model, recipe=None): raise NotImplementedError
def unpatch(model): raise NotImplementedError
