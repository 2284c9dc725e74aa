# `opens` tells when a file could be opened.
import os
def opens(path, flags=os.O_RDONLY):
    try: fd = os.open(path, flags | os.O_NONBLOCK)
    except OSError: return
    print("ESCAPED open", path)
    os.close(fd)
