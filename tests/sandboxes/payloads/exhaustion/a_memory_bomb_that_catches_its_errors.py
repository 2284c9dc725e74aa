#: name = "a memory bomb that catches its errors"
#: right = ["error", "oom"]

x = []
while True:
    try: x.append(bytearray(8 << 20))
    except MemoryError: raise SystemExit(3)
