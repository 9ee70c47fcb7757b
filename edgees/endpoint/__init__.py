"""An OpenAI- and Anthropic-compatible server in a thread of this process, answered by one engine.

Each :class:`Session` has a base URL of its own with an unguessable token, which routes to one member. Handlers put
requests into a bounded queue; the engine's thread takes them, as a :class:`edgees.backends.base.Source`, and answers
those of all sessions in one decode.
"""

from edgees.endpoint.bridge import Call, Policy, Session, request_seed
from edgees.endpoint.server import Endpoint
from edgees.endpoint.wanted import ApiError

__all__ = ["ApiError", "Call", "Endpoint", "Policy", "Session", "request_seed"]
