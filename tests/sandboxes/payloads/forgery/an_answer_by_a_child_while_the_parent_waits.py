#: name = "an answer by a child while the parent waits"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

if os.fork() == 0:
    os.write(3, frame({'id': call, 'done': 0})); os._exit(0)
os.wait(); time.sleep(0.2)
