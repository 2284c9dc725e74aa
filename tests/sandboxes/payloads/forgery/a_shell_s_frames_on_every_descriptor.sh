#: name = "a shell's frames on every descriptor"
#: right = ["error"]
#: lost = false

for i in 0 3 4 5 6 7 8 9; do printf '\0\0\0\2{}' >&$i; done 2>/dev/null; ls /proc/self/fd | wc -l; exit 5
