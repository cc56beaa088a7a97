"""edgespec: exact speculative decoding on the device in your hand. Start reading at orchestrator/loop.py."""

__version__ = "0.1.0"
