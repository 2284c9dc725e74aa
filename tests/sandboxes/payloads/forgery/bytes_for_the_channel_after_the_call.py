#: name = "bytes for the channel after the call"
#: right = ["ok"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

threading.Thread(target=lambda: (time.sleep(0.05), os.write(3, b'junk'))).start()
