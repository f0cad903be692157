"""Engines that are servers, spoken to over HTTP in SGLang's words.

`client` speaks to one server; `answers` checks what it says before anybody trains on it; `engine` makes a server look
like an engine in this process.
"""

from megarl.generation.http.client import EngineClient, Road
from megarl.generation.http.engine import HttpEngine

__all__ = ["EngineClient", "HttpEngine", "Road"]
