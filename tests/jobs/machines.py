"""Machines of one network, which are namespaces here: each has its own network, processes, name and /dev/shm."""

import os
import subprocess
from pathlib import Path

LINK = "veth0"


def has_namespaces():
    """Whether this process may make network namespaces."""
    commands = ("nsenter -V", "unshare -n -m -u -i -p -f ip link add bridge type bridge")
    try:
        ran = (subprocess.run(each.split(), capture_output=True).returncode for each in commands)
        return os.getuid() == 0 and not any(ran)
    except FileNotFoundError:
        return False


class Machines:
    """`count` of them, joined by a switch; the commands that start a process on each."""

    def __init__(self, folder, count=2):
        self.folder, self.names = folder, [f"jaxmp-{os.getpid()}-{i}" for i in range(count)]
        self.addresses = [f"10.77.21.{i + 1}" for i in range(count)]
        self.switch, self.holders = f"jaxmp-{os.getpid()}-switch", []

    def __enter__(self):
        for name in (*self.names, self.switch):
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        self._ip("-n", self.switch, "link", "add", "bridge", "up", "type", "bridge")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            self._ip("link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
            self._ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            self._ip("-n", name, "link", "set", LINK, "up")
        return self

    def __exit__(self, *_):
        for holder in self.holders:
            holder.kill()
            holder.communicate()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name])

    @staticmethod
    def _ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    def limit(self, rate):
        """The rate of the link in both directions."""
        for name in self.names:
            queue = f"qdisc replace dev {LINK} root tbf rate {rate} burst 32k limit 256k"
            subprocess.run(["tc", "-n", name, *queue.split()], check=True)

    def cut(self):
        """The link of the first one, so that what is sent is lost."""
        self._ip("-n", self.names[0], "link", "set", LINK, "down")

    def commands(self, own_address=None):
        """`own_address` is what each machine takes its own name for; None where it does not know it."""
        found = []
        for i, name in enumerate(self.names):
            hosts = self.folder / f"hosts.{i}"
            hosts.write_text("127.0.0.1 localhost\n" + (f"{own_address} machine{i}\n" if own_address else ""))
            enter = f"mount -t tmpfs none /dev/shm; mount --bind {hosts} /etc/hosts; hostname machine{i}"
            parts = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc"]
            hold = ["ip", "netns", "exec", name, *parts, "sh", "-c", f"{enter}; echo; exec sleep infinity"]
            self.holders.append(subprocess.Popen(hold, stdout=subprocess.PIPE))
            self.holders[-1].stdout.readline()  # it is set up
            holder = self.holders[-1].pid
            init = Path(f"/proc/{holder}/task/{holder}/children").read_text().strip()
            found.append(["nsenter", "-a", "-t", init])
        return found
