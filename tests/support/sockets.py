"""The TCP connections of this process, as the kernel sees them (Linux)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Connection:
    local_port: int
    peer_port: int
    no_delay: bool
    unread_bytes: int  # arrived, and not read by this process
    unsent_bytes: int  # written by this process, and not acknowledged by the peer


def connections() -> list[Connection]:
    """All that are connected; a connection between two ends in this process is there twice."""
    found = []
    for sock in _tcp_sockets():
        try:
            peer_port = sock.getpeername()[1]
        except OSError:
            continue  # it listens, or is closing
        found.append(
            Connection(
                sock.getsockname()[1],
                peer_port,
                bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)),
                _count(sock, termios.FIONREAD),
                _count(sock, termios.TIOCOUTQ),
            )
        )
    return found


def limit_send_buffers(port: int, size_bytes: int) -> None:
    """What listens on that port gives its new connections a send buffer of about that size instead of megabytes."""
    for sock in _tcp_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)


def _tcp_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed since the listing
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # no socket
        with sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
                yield sock


def _count(sock: socket.socket, request: int) -> int:
    answer: tuple[int] = struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))
    return answer[0]
