"""Who is there and who is gone: one line of TCP between process 0 and every other process, open from before JAX starts until the work is done.

Lines of JSON. A process says who it is; process 0 answers "go" when all are there. After that both sides send a beat every second. A line that closes without
"bye", or is silent too long, is a process that is lost; process 0 tells the others.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time

from labkit.errors import KernelDiedError, LabError

BEAT = 1.0
RETRY = 0.2


class _Line:
    """One connection: whole messages in and out, and when something was last heard."""

    def __init__(self, connection: socket.socket, peer: str):
        self.connection, self.peer = connection, peer
        self.heard, self.left, self._rest = time.monotonic(), False, b""
        connection.setblocking(True)
        connection.settimeout(BEAT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """What has come, or None when the other side closed the line."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


class RollCall:
    """The lines of one process: of process 0 to all others, of each other to process 0."""

    def __init__(self, host: str, port: int, count: int, index: int, *, lost_timeout: float, leave_timeout: float):
        self.host, self.port, self.count, self.index = host, port, count, index
        self.lost_timeout, self.leave_timeout = lost_timeout, leave_timeout
        self._lines: dict[int, _Line] = {}
        self._loss: KernelDiedError | None = None
        self._lost, self._all_done, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._done: set[int] = set()
        self._guard = threading.Lock()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def join(self, timeout: float) -> None:
        """Returns when every process is there, the line then being watched. Raises LabError naming those that are not within `timeout` seconds."""
        try:
            self._gather(timeout) if self.index == 0 else self._report(timeout)
        except LabError:
            self.close()
            raise
        threading.Thread(target=self._watch, name="labkit-roll", daemon=True).start()
        threading.Thread(target=self._beat, name="labkit-beat", daemon=True).start()

    def _gather(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        try:
            server = socket.create_server(("", self.port), backlog=self.count, reuse_port=False)
        except OSError as error:
            raise LabError(
                f"process 0 cannot listen on port {self.port}: {error.strerror or error}",
                self.address,
                "choose another coordinator port, or end what holds this one",
            ) from None
        with server:
            while len(self._lines) < self.count - 1:
                server.settimeout(max(0.01, min(RETRY, end - time.monotonic())))
                try:
                    connection, peer = server.accept()
                except TimeoutError:
                    self._drop_gone()
                    if time.monotonic() >= end:
                        raise self._refuse(self._missing(timeout)) from None
                    continue
                self._greet(_Line(connection, peer[0]), end)
        for line in self._lines.values():
            line.send(go=True)

    def _drop_gone(self) -> None:
        """A process that joined and ended before the others came is missing again."""
        for index, line in list(self._lines.items()):
            line.connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if line.connection.recv(1, socket.MSG_PEEK) == b"":
                    line.close()
                    del self._lines[index]
            line.connection.settimeout(BEAT) if index in self._lines else None

    def _greet(self, line: _Line, end: float) -> None:
        said: list[dict] | None = []
        while said == [] and time.monotonic() < end:
            said = line.receive()
        if not said or not isinstance(said[0], dict) or "index" not in said[0]:
            line.close()  # not one of ours
            return
        index, count, host = said[0]["index"], said[0].get("count"), said[0].get("host", "")
        line.peer = f"{host} ({line.peer})"
        if count != self.count:
            raise self._refuse(
                LabError(
                    f"process {index} counts {count} processes and process 0 counts {self.count}", line.peer, "start all with the same number of processes"
                ),
                line,
            )
        if index in self._lines or not 0 < index < self.count:
            other = self._lines[index].peer if index in self._lines else "process 0"
            raise self._refuse(LabError(f"two processes call themselves process {index}", f"{other} and {line.peer}", "give each process its own number"), line)
        self._lines[index] = line

    def _missing(self, timeout: float) -> LabError:
        absent = [index for index in range(1, self.count) if index not in self._lines]
        named = f"process {absent[0]}" if len(absent) == 1 else f"processes {', '.join(map(str, absent))}"
        joined = ", ".join(["0 (this one)", *(f"{index} on {line.peer}" for index, line in sorted(self._lines.items()))])
        return LabError(
            f"{len(absent)} of {self.count} processes did not join within {timeout:g} seconds: {named}",
            f"roll call at {self.address}; joined: {joined}",
            f"start the same command there too, and see that its host reaches {self.address}; then start all again",
        )

    def _refuse(self, error: LabError, extra: _Line | None = None) -> LabError:
        for line in [*self._lines.values(), *([extra] if extra else [])]:
            line.send(error=error.as_dict())
            line.close()
        self._lines.clear()
        return error

    def _report(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), timeout=max(0.1, end - time.monotonic()))
                break
            except OSError as error:
                if time.monotonic() + RETRY >= end:
                    raise LabError(
                        f"process 0 did not answer within {timeout:g} seconds: {error.strerror or error}",
                        f"process {self.index} of {self.count}, roll call at {self.address}",
                        f"start process 0 on {self.host}, and see that this host reaches its port {self.port}",
                    ) from None
                time.sleep(RETRY)
        line = self._lines[0] = _Line(connection, self.address)
        line.send(index=self.index, count=self.count, host=socket.gethostname())
        end += 5  # process 0 gives up first, and then tells who is missing
        while True:
            said = line.receive()
            for message in said or []:
                if "error" in message:
                    raise LabError(**message["error"])
                if "go" in message:
                    return
            if said is None or time.monotonic() >= end:
                raise LabError(
                    f"process 0 {'ended' if said is None else 'is silent'} before all {self.count} processes had joined",
                    f"process {self.index}, roll call at {self.address}",
                    "see what process 0 says, then start all again",
                )

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            for line in list(self._lines.values()):
                line.send(beat=True)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, index)
            while not self._closed.is_set() and selector.get_map():
                for key, _ in selector.select(BEAT / 2):
                    index = key.data
                    said = self._lines[index].receive()
                    for message in said or []:
                        self._hear(index, message)
                    if said is None:
                        selector.unregister(key.fileobj)
                        if not self._lines[index].left:
                            self._lose(index, "ended")
                now = time.monotonic()
                for index, line in self._lines.items():
                    if not line.left and now - line.heard > self.lost_timeout:
                        self._lose(index, f"has been silent for {self.lost_timeout:g} seconds")

    def _hear(self, index: int, message: dict) -> None:
        if "lost" in message:
            self._tell(message["lost"]["what"], message["lost"]["where"])
        if "bye" in message:
            self._lines[index].left = True
        if "done" in message:
            self._done.add(index)
            self._settle()

    def _settle(self) -> None:
        """Process 0 says when all have done their work; the others wait for that."""
        if self.index != 0:
            self._all_done.set()
        elif len(self._done) == self.count:
            for line in self._lines.values():
                line.send(done=True)
            self._all_done.set()

    def _lose(self, index: int, how: str) -> None:
        what, where = f"process {index} of {self.count} {how} in the middle of the work", f"{self._lines[index].peer}"
        for other, line in self._lines.items():
            if other != index:
                line.send(lost={"what": what, "where": where})
        self._tell(what, where)

    def _tell(self, what: str, where: str) -> None:
        with self._guard:
            if self._loss is not None or self._closed.is_set():
                return
            self._loss = KernelDiedError(
                what,
                f"{where}, noticed by process {self.index}",
                "see what that process said last; start all of them again with the same command: training goes on from its last checkpoint",
            )
        self._lost.set()
        threading.Thread(target=self._end_later, name="labkit-end", daemon=True).start()

    def _end_later(self) -> None:
        """This process may hang in a collective that never ends: it is ended when it does not end by itself."""
        time.sleep(self.leave_timeout)
        if not self._closed.is_set():
            self.say()
            end_with(KernelDiedError.exit_code)

    def loss(self, wait: float = 0) -> KernelDiedError | None:
        """The loss of another process, if there is one within `wait` seconds."""
        self._lost.wait(wait)
        return self._loss

    def say(self) -> None:
        """The loss to stderr, as the command would print it."""
        if self._loss is not None:
            print(f"labkit: {self._loss.paragraph()}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Returns when every process has called it. Raises the loss of one that never will."""
        if self.index == 0:
            self._done.add(0)
            self._settle()
        else:
            self._lines[0].send(done=True)
        while not self._all_done.wait(0.1):
            if self._loss is not None:
                raise self._loss
        for line in self._lines.values():
            line.left = True
            line.send(bye=True)

    def close(self) -> None:
        self._closed.set()
        for line in self._lines.values():
            line.close()


def end_with(code: int) -> None:
    """End the process at once: what runs at a normal exit waits for the processes that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_handler = None


def in_words_on_abort(roll: RollCall) -> None:
    """When process 0 is gone JAX's runtime aborts every other process at once (SIGABRT, from a thread of its own). The process then says in words which one is
    gone, and ends with the exit code of a process that died."""
    global _handler

    def handle(_signal) -> None:
        if roll.loss(wait=2) is None:
            ctypes.CDLL(None).signal(signal.SIGABRT, None)
            return
        roll.say()
        end_with(KernelDiedError.exit_code)

    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    ctypes.CDLL(None).signal(signal.SIGABRT, _handler)
