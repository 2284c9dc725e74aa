#: name = "an ask of a function that is not offered"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

os.write(3, frame({'id': call, 'ask': 1}, json.dumps(['__import__', ['os'], {}]).encode()))
time.sleep(0.05)
