"""The system calls that a sandbox may make: sandbox/seccomp.json, as text for Docker and compiled for bubblewrap."""

import base64
import functools
import json
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.errors import SandboxError
from agentgym.sandboxes.server_files import image_folder

AF_INET, AF_INET6 = 2, 10
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
EPERM, ENOPROTOOPT = 1, 92
X32 = 0x40000000
"""First number of the x32 table, a second system call table on x86-64."""
LOAD, AND, JUMP_EQUAL, JUMP_FROM, JUMP_ABOVE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
KEEPERS_CALLS = ("clone", "mount", "setns", "umount2", "unshare")
SOL_SOCKET, SO_PASSPIDFD, SO_PEERPIDFD = 1, 76, 77
SOL_IPV6, IPV6_FLOWLABEL_MGR = 41, 32


def _no_option(level: int, option: int, mask: int = 0xFFFFFFFF) -> Mapping[str, Any]:
    """Return a rule that refuses a socket option with the errno of a kernel that lacks the option.

    Like the kernel, the rule compares only 32 bits of the level and of the option. Of the option's bits, it compares
    only those that are set in `mask`.
    """
    return {
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": ENOPROTOOPT,
        "args": [
            {"index": 1, "value": 0xFFFFFFFF, "valueTwo": level, "op": "SCMP_CMP_MASKED_EQ"},
            {"index": 2, "value": mask, "valueTwo": option & mask, "op": "SCMP_CMP_MASKED_EQ"},
        ],
    }


NO_PIDFD = _no_option(SOL_SOCKET, SO_PASSPIDFD & SO_PEERPIDFD, 0xFFFFFFFE)
"""Refuses to give code a pidfd of the process at the other end of a socket.

That process is the server, and the pidfd's inode number reveals how many processes were created since the server
started.
"""
NO_FLOW_LABEL = _no_option(SOL_IPV6, IPV6_FLOWLABEL_MGR)
"""Refuses IPv6 flow labels: they outlive their sockets, carry 16 bytes each, and the machine has only 4096."""
NO_OPTIONS = {"getsockopt": (NO_PIDFD,), "setsockopt": (NO_PIDFD, NO_FLOW_LABEL)}
"""Socket options that code may not use, keyed by system call.

They are not in the JSON, because libseccomp accepts no conditional rule next to a call's unconditional permission.
"""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; each argument has its low 32 bits first."""


@functools.cache
def profile(*, network: bool, keeper: bool = False) -> str:
    """Return the allow-list as the JSON text that Docker accepts.

    Args:
        network: Whether to add the internet address families.
        keeper: Whether to add the calls with which the sandbox's keeper, its first process, creates namespaces. For the
            code, the server installs the allow-list without them.
    """
    rules = json.loads((image_folder() / "seccomp.json").read_text())
    if keeper:
        rules["syscalls"].append({"names": KEEPERS_CALLS, "action": "SCMP_ACT_ALLOW", "args": []})
    if network:
        for family in (AF_INET, AF_INET6):
            args = [{"index": 0, "value": family, "valueTwo": 0, "op": "SCMP_CMP_EQ"}]
            rules["syscalls"].append({"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": args})
    return json.dumps(rules)


@functools.cache
def program(*, network: bool = False, machine: str = "") -> bytes:
    """Return the allow-list as a BPF program.

    Args:
        network: Whether to add the internet address families.
        machine: The kernel's name of the architecture; "" for this machine's.

    Raises:
        SandboxError: If there is no system call table for this machine.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise SandboxError(f"no system call table for {machine}; supported machines: {sorted(MACHINES)}")
    architecture, table = MACHINES[machine]
    rules = json.loads(profile(network=network))["syscalls"]
    return b"".join(_filter(rules, architecture, numbers(table)))


def filters(*, network: bool = False) -> Mapping[str, str]:
    """Return the allow-list's program in base64, keyed by the kernel's name of each supported architecture."""
    return {name: base64.b64encode(program(network=network, machine=name)).decode() for name in MACHINES}


def numbers(table: str) -> dict[str, int]:
    """Return the numbers of the system calls in a table, keyed by name.

    In the table, each run of consecutive numbers is written as its first number, followed by the names of the calls:
    `13: rt_sigaction rt_sigprocmask`.
    """
    found: dict[str, int] = {}
    number = 0
    for word in table.split():
        if word.endswith(":"):
            number = int(word[:-1])
        else:
            found[word] = number
            number += 1
    return found


def _filter(rules: Sequence[Mapping[str, Any]], architecture: int, known: Mapping[str, int]) -> Iterator[bytes]:
    """Yield the filter's instructions.

    The check that kills a process of another architecture comes first, then the refused socket options, then ranges
    of unconditional calls, then the calls with conditions, one by one.

    Args:
        rules: The allow-list's rules, as in sandbox/seccomp.json.
        architecture: The audit number of the architecture.
        known: The architecture's system call numbers, keyed by name.
    """
    yield _step(LOAD, ARCHITECTURE)
    yield _step(JUMP_EQUAL, architecture, yes=1)
    yield _step(RETURN, KILL_PROCESS)
    yield _step(LOAD, NUMBER)
    yield _step(JUMP_FROM, X32, no=1)
    yield _step(RETURN, ERRNO | EPERM)
    for name, refused in NO_OPTIONS.items():
        block = [step for rule in refused for step in _rule(rule)]
        yield _step(JUMP_EQUAL, known[name], no=len(block) + 1)
        yield from block
        yield _step(LOAD, NUMBER)
    conditions: dict[int, list[Mapping[str, Any]]] = {}
    plain: list[int] = []
    for rule in rules:
        here = [known[name] for name in rule["names"] if name in known]
        if rule["args"] or rule["action"] != "SCMP_ACT_ALLOW":
            for number in here:
                conditions.setdefault(number, []).append(rule)
        else:
            plain += here
    for first, last in _spans(plain):
        yield _step(JUMP_FROM, first, no=2)
        yield _step(JUMP_ABOVE, last, yes=1)
        yield _step(RETURN, ALLOW)
    for number, its_rules in conditions.items():
        block = [step for rule in its_rules for step in _rule(rule)]
        yield _step(JUMP_EQUAL, number, no=len(block) + 1)
        yield from block
        yield _step(RETURN, ERRNO | EPERM)
    yield _step(RETURN, ERRNO | EPERM)


def _rule(rule: Mapping[str, Any]) -> list[bytes]:
    """Return instructions that return the rule's action if all its conditions hold, and otherwise fall through."""
    action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule.get("errnoRet", EPERM)
    steps = [_step(RETURN, action)]
    for condition in rule["args"]:
        masked = condition["op"] == "SCMP_CMP_MASKED_EQ"
        wanted = condition["valueTwo"] if masked else condition["value"]
        mask = condition["value"] if masked else (1 << 64) - 1
        for half in (1, 0):
            shift = 32 * half
            test = [
                _step(LOAD, ARGUMENTS + 8 * condition["index"] + 4 * half),
                _step(AND, mask >> shift & 0xFFFFFFFF),
                _step(JUMP_EQUAL, wanted >> shift & 0xFFFFFFFF, no=len(steps)),
            ]
            steps = test + steps
    return steps


def _spans(known: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run of consecutive numbers."""
    spans: list[tuple[int, int]] = []
    for number in sorted(known):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _step(code: int, operand: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, operand)


X86_64 = """
0: read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
  rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
  shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
  sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
  clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
  fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
  readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
  syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups
  setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
  rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
  sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
  sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
  modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
  swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
  get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
  setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
  fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy io_getevents
  io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages
  getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime
  timer_getoverrun timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait
  epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive
  mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
  inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat unlinkat
  renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list get_robust_list
  splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create eventfd fallocate
  timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
  rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at
  open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp finit_module
  sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create kexec_file_load bpf execveat userfaultfd
  membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
424: pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
  fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
  quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
  futex_waitv set_mempolicy_home_node
"""

AARCH64 = """
0: io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
  listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2 epoll_create1
  epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get
  flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root nfsservctl statfs fstatfs
  truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup
  pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll
  signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync sync_file_range2 timerfd_create
  timerfd_settime timerfd_gettime utimensat acct capget capset personality exit exit_group waitid set_tid_address
  unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module
  timer_create timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres
  clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam
  sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min
  sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask
  rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority reboot setregid setgid setreuid
  setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups
  setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask prctl getcpu gettimeofday
  settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo mq_open mq_unlink mq_timedsend
  mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl
  shmat shmdt socket socketpair bind listen accept connect getsockname getpeername sendto recvfrom setsockopt
  getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl clone execve mmap
  fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind
  get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4 recvmmsg
260: wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
  sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
  getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
  pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
424: pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig fsmount
  fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr
  quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease
  futex_waitv set_mempolicy_home_node
"""

MACHINES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
"""The audit number and the system call table of each architecture, keyed by the kernel's name for the architecture."""
