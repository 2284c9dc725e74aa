#: name = "a lone surrogate"
#: right = ["ok"]
#: lost = false

print('\ud800')
