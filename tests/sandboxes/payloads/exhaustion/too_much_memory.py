#: name = "too much memory"
#: right = ["error", "oom"]

x = b'x' * (3 << 30)
