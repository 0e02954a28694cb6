from zero.lazy import loader

__getattr__ = loader(__name__, {})
