#: name = "answers for calls to come"
#: right = ["ok"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

for i in range(1, 20): worker().call = call
threading.Thread(target=lambda: (time.sleep(0.05), os.write(3, b''.join(frame({'id': call + i, 'done': 0}) for i in range(1, 9))))).start()
