# Prints, as JSON, what a session could find of the ones before it.
import builtins, gc, json, os, resource, signal, socket, sys, threading
def rows(path):
    try: return sorted(open(path, errors='backslashreplace').read().splitlines()[1:])
    except OSError: return []
def marks(place):
    there = os.stat(place)
    return oct(there.st_mode), there.st_uid, there.st_gid, os.listxattr(place), there.st_mtime > 1e9
def handles():
    for fd in range(256):
        try: yield fd, os.readlink(f'/proc/self/fd/{fd}').split(':')[0]
        except OSError: pass
status = dict(line.split(':', 1) for line in rows('/proc/self/status') if ':' in line)
kept = ('Uid Gid Groups SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Threads '
        'Cpus_allowed THP_enabled').split()
alone = os.getppid() in (0, 1)  # The server is in a namespace above, or is the first process of this one.
places = ['/tmp', '/dev/shm', '/dev/mqueue', '/branches'] if alone else [os.getcwd()]
places = list(filter(os.path.isdir, places))
print(json.dumps({
    'files': {place: [os.fsdecode(n) for n in sorted(os.listdir(os.fsencode(place)))] for place in places},
    'marks': {place: marks(place) for place in places},
    'processes': sum(p.isdigit() for p in os.listdir('/proc')) if alone else 2,
    'environment': dict(os.environ),
    'modules': sorted(sys.modules),
    'builtins': sorted(f'{name} {type(value).__name__}' for name, value in vars(builtins).items() if name != '_'),
    'sys': sorted(vars(sys)),
    'names': sorted(name for name in globals() if name.startswith('e') or name.startswith('x')),
    'path': [sys.path, sys.argv, os.getcwd(), sys.meta_path and len(sys.meta_path), len(sys.path_hooks)],
    'signals': [(int(n), str(signal.getsignal(n)).split(' at ')[0]) for n in signal.valid_signals()],
    'limits': {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith('RLIMIT')},
    'priority': [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    'first to die': open('/proc/self/oom_score_adj').read(),
    'umask': [os.umask(0), os.umask(0o22)],
    'python': [sys.getrecursionlimit(), gc.isenabled(), threading.active_count(), sys.gettrace(), sys.getprofile()],
    'timers': [signal.getitimer(n) for n in (0, 1, 2)],
    'handles': list(handles()),
    'status': {name: status.get(name, '').strip() for name in kept},
    'ipc': [rows('/proc/sysvipc/' + kind) for kind in ('shm', 'sem', 'msg')] if alone else [],
    'sockets': [len(rows('/proc/net/unix')), len(rows('/proc/net/tcp'))] if alone else [],
    'keys': [row for row in rows('/proc/keys') if 'agentgym' in row] if alone else [],
    'mounts': sorted([line.split()[4:6] for line in open('/proc/self/mountinfo')]) if alone else [],
    'hostname': socket.gethostname(),
    'stack': threading.stack_size(),
}).replace(os.getcwd() + '"', 'WORK"').replace(os.getcwd() + '/', 'WORK/'))
