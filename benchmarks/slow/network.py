"""Network namespaces joined by rate-limited virtual Ethernet, gone whatever ends the device_plan.

    rank 0's namespace          hub's namespace           rank 1's namespace
      link0 10.77.0.1 --tbf-->  port0 |bridge| port1  <--tbf-- link0 10.77.0.2
                      <--tbf--                        --tbf-->

Each link is shaped both ways with the kernel's token bucket (`tc tbf`), so a rank sends and
receives at the given rate at most, both at once, however many peers it has.

The program that makes all this runs as the first process of process, mount and network namespaces
of its own (`isolated`).  When it ends, for whatever reason, the kernel kills all processes inside
and drops the namespaces with their links and names: there is nothing to clean up by hand.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

TOOLS = ("ip", "tc", "unshare")
# Names of namespaces are files: they go to a file system that ends with the mount namespace.
_OWN_RUN = "mount -t tmpfs libra /var/run"
_PROBE = (
    f"{_OWN_RUN} && ip link add probe0 type veth peer name probe1 && "
    "tc qdisc add dev probe0 root tbf rate 100mbit burst 256kb latency 100ms && "
    "ip netns add probe && ip link add probe2 type bridge"
)
_PR_SET_PDEATHSIG = 1


def missing() -> str | None:
    """Why no slow network can be made here, or None."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not found; install iproute2 and util-linux"
    probe = subprocess.run(
        isolated(["sh", "-c", _PROBE]), capture_output=True, text=True, timeout=30, check=False
    )
    if probe.returncode:
        said = (probe.stderr or probe.stdout).strip().splitlines() or ["no message"]
        return f"this kernel or container does not let it make a slow link: {said[-1]}"
    return None


def isolated(command: Sequence[str]) -> list[str]:
    """`command` as the first process of namespaces of its own."""
    own = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return ["unshare", *own, "--propagation", "private", *command]


def dies_with_parent() -> Callable[[], None]:
    """What a child runs before its device_plan, so that it is killed when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask


def address(rank: int) -> str:
    """The rank's address in the slow network."""
    return f"10.77.0.{rank + 1}"


def inside(rank: int, command: Sequence[str]) -> list[str]:
    """`command` run in the rank's namespace."""
    return ["ip", "netns", "exec", f"rank{rank}", *command]


def make_network(ranks: int) -> None:
    """One namespace a rank and the hub between them; only where `isolated` runs the caller."""
    _ip("link set lo up")
    subprocess.run(_OWN_RUN.split(), check=True)
    _ip("netns add hub")
    _ip("-n hub link add bridge0 type bridge stp_state 0 forward_delay 0")
    _ip("-n hub link set bridge0 up")
    for rank in range(ranks):
        name = f"rank{rank}"
        _ip(f"netns add {name}")
        _ip(f"link add port{rank} netns hub type veth peer name link0 netns {name}")
        _ip(f"-n hub link set port{rank} master bridge0")
        _ip(f"-n hub link set port{rank} up")
        _ip(f"-n {name} addr add {address(rank)}/24 dev link0")
        _ip(f"-n {name} link set lo up")
        _ip(f"-n {name} link set link0 up")


def shape(ranks: int, mbit: float | None, burst_kb: int) -> None:
    """Let every link carry `mbit` Mbit/s each way; None lifts the limit."""
    for rank in range(ranks):
        for space, link in ((f"rank{rank}", "link0"), ("hub", f"port{rank}")):
            tc = ["tc", "-n", space, "qdisc"]
            if mbit is None:
                subprocess.run([*tc, "del", "dev", link, "root"], capture_output=True, check=False)
                continue
            bucket = f"tbf rate {mbit:.3f}mbit burst {burst_kb}kb latency 200ms"
            subprocess.run([*tc, "replace", "dev", link, "root", *bucket.split()], check=True)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
