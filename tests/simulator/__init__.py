"""The real ledger code on a virtual clock: schedules of calls and faults, each of them one seed (docs/proof.md).

schedule   a seed -> what happens when: calls, faults, changes of limits                         (pure)
world      performs a schedule on replicas, a store, disks and a provider, heals everything, asks the checker
replica    one gateway process as far as money goes: SqlLedger, SqlKeyStore, Reaper, and the requests it serves
loop       time that jumps; processes that pause and die between two awaits
store      Postgres at READ COMMITTED, as far as our statements can tell, on SQLite in memory
disk       journals: slow, full, torn by a crash
provider   bills what reaches it, and keeps the bill
checker    the promises, looked at after every commit and at the end
shrink     the smallest part of a failing schedule that still fails
"""
