#: name = "the parent's memory and descriptors"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]
#: uses = ["opens"]

for name in ('mem', 'environ', 'maps', 'auxv', 'stack', 'syscall', 'fd/3', 'root/etc', 'cwd', 'map_files', 'pagemap', 'exe'):
    opens(f'/proc/{os.getppid()}/{name}')
for name in ('oom_score_adj', 'clear_refs', 'coredump_filter', 'comm', 'mem', 'sched', 'setgroups'):
    opens(f'/proc/{os.getppid()}/{name}', os.O_WRONLY)
try: print('ESCAPED', os.listdir(f'/proc/{os.getppid()}/fd'))
except OSError: pass
