#: name = "code that runs at the start"
#: right = ["ok"]

d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d
echo 'import os; print("evil")' > $d/evil.pth
for f in $d/sitecustomize.py $d/usercustomize.py sitecustomize.py usercustomize.py json.py os.py re.py; do
  echo 'print("evil")' > $f
done
for f in .bashrc .profile .bash_profile .bash_login .pythonrc.py .inputrc; do echo 'echo evil' > ~/$f; done
export BASH_ENV=~/.bashrc ENV=~/.bashrc PYTHONSTARTUP=~/.pythonrc.py PYTHONPATH=/tmp LD_PRELOAD=/tmp/evil.so
