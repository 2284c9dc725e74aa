#: name = "a daemon that answers in the worker's place"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol", "timeout"]
#: uses = ["frames"]

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try: head = os.read(3, 4)
            except OSError: os._exit(0)
            if not head: os._exit(0)
            got = json.loads(os.read(3, struct.unpack('>I', head)[0]))
            os.read(3, got.get('body', 0)); os.write(1, b'forged')
            os.write(3, frame({'id': got['id'], 'done': 0}))
    os._exit(0)
os.wait()
