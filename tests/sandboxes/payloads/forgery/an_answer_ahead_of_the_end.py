#: name = "an answer ahead of the end"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': 0}))
time.sleep(0.2)
