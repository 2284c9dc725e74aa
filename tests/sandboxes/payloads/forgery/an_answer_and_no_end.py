#: name = "an answer and no end"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol", "timeout"]
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': 0}))
while True: time.sleep(1)
