"""Who may call which route: the rules of SGLang's api key and admin key."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from megarl.core.secret import Secret

# Probes carry no secrets.
_OPEN = ("/health", "/health_generate", "/ready")
# What a user of the engine may call. All other routes change the engine: they are control routes.
_OF_USERS = ("/generate", "/model_info", "/server_info", "/v1/loads")


def key_check(api_key: Secret | None, admin_key: Secret | None) -> Middleware:
    """A middleware. Control routes need the admin key if there is one, and then refuse the api key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        key = api_key if request.path in _OF_USERS else admin_key or api_key
        if key is not None and not _has_key(request, key):
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return await handler(request)

    return check


def _has_key(request: web.Request, key: Secret) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # In a time that does not tell how much of the token was right.
    is_same = hmac.compare_digest(token.encode("utf-8", "surrogateescape"), key.reveal().encode())
    return scheme.lower() == "bearer" and is_same
