"""The session API over HTTP and WebSocket, for pages and tools of this machine (spec: session_api, section 7)."""
