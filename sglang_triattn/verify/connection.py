"""The way to a server, for the subcommands that ask one: past proxies where there can be none, and through TLS."""

from __future__ import annotations

import ipaddress
import json
import ssl
import urllib.parse
import urllib.request
from http.client import HTTPResponse
from typing import Any
from urllib.error import URLError

from sglang_triattn.errors import TriAttentionError, first_line


class Connection:
    """Requests to one server.

    Args:
        url: of the server, perhaps with the path under which a proxy has it.
        api_key: the server's, or None.
        cacert: file with the certificates in PEM that are trusted instead of the system's, authorities' or the server's
            own; None for the system's.
        insecure: whether to trust any certificate.

    Raises:
        TriAttentionError: the URL is none of a server, the two ways to trust contradict each other or the URL, or
            `cacert` holds no certificate.
    """

    def __init__(self, url: str, api_key: str | None = None, cacert: str | None = None, insecure: bool = False) -> None:
        self.url = server_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        given = [flag for flag, value in (("--cacert", cacert), ("--insecure", insecure)) if value]
        if len(given) > 1:
            raise TriAttentionError("--cacert and --insecure contradict each other: give one of them.")
        handlers: list[urllib.request.BaseHandler] = [_Proxies()]
        if self.url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=_trust(cacert, insecure)))
        elif given:
            raise TriAttentionError(
                f"{given[0]} is for https, but --url is {url}: give a URL that begins with https://, or leave "
                f"{given[0]} out."
            )
        self._opener = urllib.request.build_opener(*handlers)

    def open(self, path: str, timeout: float, body: dict[str, Any] | None = None) -> HTTPResponse:
        """Sends a GET, or a POST of `body`, and returns the answer, to be closed.

        Raises:
            TriAttentionError: the server's certificate is not trusted.
            OSError: nothing answers, or with an HTTP status that is an error (urllib.error.HTTPError).
            http.client.HTTPException: what answers does not speak HTTP.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"} if body is not None else self._headers
        try:
            return self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout)
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise TriAttentionError(
                    f"The certificate of {self.url} is not trusted ({error.reason.verify_message.rstrip('.')}): give "
                    "it, or that of its authority, with --cacert FILE, or connect without checking it with --insecure."
                ) from None
            raise


class _Proxies(urllib.request.ProxyHandler):
    """The environment's proxies, but none to this machine, which a proxy would take for itself."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        return None if is_loopback(req.host) else super().proxy_open(req, proxy, type)


def is_loopback(place: str) -> bool:
    """Whether a host, perhaps with a port as in URLs, names this machine itself on any network."""
    host = (urllib.parse.urlsplit(f"//{place}").hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    # Connecting to 0.0.0.0 or :: reaches this machine, too.
    return mapped.is_loopback or mapped.is_unspecified


def _trust(cacert: str | None, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=cacert)
    except ssl.SSLError as error:
        raise TriAttentionError(
            f"--cacert is {cacert}, which holds no certificate ({error.reason or first_line(error)}): give a file in "
            "PEM, whose certificates begin with -----BEGIN CERTIFICATE-----."
        ) from None
    except OSError as error:
        raise TriAttentionError(
            f"--cacert is {cacert}, which cannot be read ({first_line(error)}): give the file of the server's "
            "certificate, or of its authority's."
        ) from None
    if cacert is not None:
        # A certificate that the user names is trusted as it is, as by curl: it need not be an authority's, nor have all
        # the fields that newer versions of Python ask for.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def server_url(url: str) -> str:
    """The address of a server as --url gives it. Raises TriAttentionError unless it begins with http:// or https://."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise TriAttentionError(f"--url is {url}, but it must look like http://host:30000.")
    return url.rstrip("/")
