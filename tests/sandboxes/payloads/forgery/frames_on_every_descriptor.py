#: name = "frames on every descriptor"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

answer = frame({'id': 1, 'status': 'ok', 'exit_code': 0, 'done': '0', 'body': 0})
for fd in range(3, 64):
    try: os.write(fd, answer)
    except OSError: pass
