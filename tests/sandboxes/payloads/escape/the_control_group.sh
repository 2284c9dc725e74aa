#: name = "the control group"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

for d in /sys/fs/cgroup /sys/fs/cgroup/*; do for f in cgroup.procs tasks release_agent notify_on_release memory.limit_in_bytes memory.max pids.max devices.allow cgroup.subtree_control; do [ -e $d/$f ] && echo 1 2>/dev/null > $d/$f && echo ESCAPED $d/$f; done; mkdir $d/evil 2>/dev/null && echo ESCAPED $d; done; true
