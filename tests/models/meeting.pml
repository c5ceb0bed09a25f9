/* How ranks find out that they share memory: csrc/transport/bootstrap/connect_shm.cc, whose steps are numbered
 * there, over torch's store and Unix sockets.
 *
 * Checked in every order of every rank's steps, for every choice of ranks that cannot reach
 * each other:
 *   - no rank waits for ever, though a deadline only passes where a rank is lost;
 *   - no rank maps memory that is not laid out, nor a stranger's;
 *   - ranks that end without an error agree, and share memory only if each has all others';
 *   - without a fault none ends with an error, and they share if all can reach each other.
 *
 * RANKS: how many. CRASH: one rank's process may end before any step. LATE: any wait may pass
 * its deadline. STRANGER: another process of the user connects to a rank.
 * BREAK: leaves out one thing that the protocol needs; a check must then find an error.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef BREAK
#define BREAK 0
#endif
#define LATE_WINDOW 1
#define NO_DIAL_LISTS 2
#define ANSWER_AWAITED_FIRST 3
#define NO_NONCE 4
#define NO_OUTCOMES 5

#define AT(from, to) ((from) * RANKS + (to))

mtype = { unknown, shared, apart };
mtype = { none, dialled, answered, refused };
mtype = { at_work, has_shared, has_parted, has_failed };

bit laid_out[RANKS];               /* a rank's window */
bit listens[RANKS];
bit strangers[RANKS];              /* one waits to be accepted */
mtype link[RANKS * RANKS] = none;  /* the connection of a higher rank to a lower one */
bit mapped[RANKS * RANKS];
bit reaches[RANKS * RANKS];        /* in one host and network namespace */
mtype ended[RANKS] = at_work;
bit dead[RANKS];
bool fault = false;
bit unreachable;                   /* some pair */

/* The store */
bit card[RANKS];
bit dials[RANKS];                  /* whether the list is there */
bit dial[RANKS * RANKS];           /* what it says */
mtype outcome[RANKS] = unknown;
bool trouble = false;

#define LOST(rank) (dead[rank] || ended[rank] == has_failed)
#if RANKS == 2
#define ANY_LOST (LOST(0) || LOST(1))
#define NO_RANK_DIALS(me) (link[AT(0, me)] != dialled && link[AT(1, me)] != dialled)
#else
#define ANY_LOST (LOST(0) || LOST(1) || LOST(2))
#define NO_RANK_DIALS(me) \
  (link[AT(0, me)] != dialled && link[AT(1, me)] != dialled && link[AT(2, me)] != dialled)
#endif

/* Where a wait ends by its deadline */
inline pass_deadline() {
#ifdef LATE
  fault = true;
#endif
  goto fails
}
#ifdef LATE
#define DEADLINE true
#else
#define DEADLINE ANY_LOST
#endif

/* Waits for a key of the store, and now and then looks for trouble. */
inline get(key) {
  if
  :: atomic { key -> skip }
  :: atomic { !(key) && trouble -> goto fails }
  :: atomic { !(key) && DEADLINE -> pass_deadline() }
  fi
}

inline adopt(r) { atomic { assert(laid_out[r]); mapped[AT(me, r)] = 1 } }

/* The handshake and the window are in the socket from here on. */
inline dial_lower() {
  if
  :: atomic { reaches[AT(me, r)] && listens[r] -> link[AT(me, r)] = dialled; dial[AT(me, r)] = 1 }
  :: atomic { !(reaches[AT(me, r)] && listens[r]) -> problem = 1 }
  fi
}

/* Accepts one connection of a higher rank, in any order; a stranger's is closed. */
inline welcome() {
  do
  :: atomic { link[AT(1, me)] == dialled -> r = 1; break }
#if RANKS > 2
  :: atomic { link[AT(2, me)] == dialled -> r = 2; break }
#endif
  :: atomic { strangers[me] -> strangers[me] = 0;
#if BREAK == NO_NONCE
      assert(false);  /* its memory would be mapped as a rank's */
#endif
    }
  :: atomic { NO_RANK_DIALS(me) && DEADLINE -> pass_deadline() }
  od;
  if
  :: atomic { !LOST(r) -> link[AT(r, me)] = answered }; adopt(r)
  :: atomic { LOST(r) -> link[AT(r, me)] = refused; problem = 1 }
  fi
}

inline take_answer() {
  if
  :: atomic { link[AT(me, r)] == answered -> skip }; adopt(r)
  :: atomic { link[AT(me, r)] == refused || (link[AT(me, r)] == dialled && LOST(r)) -> problem = 1 }
#ifdef LATE
  :: atomic { link[AT(me, r)] == dialled -> fault = true; problem = 1 }
#endif
  fi
}

inline check_end() {
  d_step {
    r = 0;
    do
    :: r < RANKS ->
      if
      :: ended[me] == has_shared ->
        assert(ended[r] != has_parted);
        assert(r == me || mapped[AT(me, r)] && mapped[AT(r, me)])
      :: ended[me] == has_parted ->
        assert(ended[r] != has_shared)
      fi;
      r++
    :: else -> break
    od
  }
}

proctype Rank(byte me) {
  byte r = 0;
  byte expected = 0;
  bit problem = 0;
  {
    /* 1 */
#if BREAK != LATE_WINDOW
    laid_out[me] = 1;
#endif
    listens[me] = 1;
    card[me] = 1;
    do
    :: atomic { r < RANKS -> skip }; get(card[r]); r++
    :: else -> r = 0; break
    od;
    /* 2 */
    do
    :: atomic { r < me -> skip }; dial_lower();
#if BREAK == ANSWER_AWAITED_FIRST
      if
      :: dial[AT(me, r)] -> take_answer()
      :: else
      fi;
#endif
      r++
    :: else -> break
    od;
    /* 3 */
    dials[me] = 1;
#if BREAK == LATE_WINDOW
    laid_out[me] = 1;
#endif
    r = me + 1;
    do
    :: atomic { r < RANKS -> skip };
#if BREAK == NO_DIAL_LISTS
      expected++;
#else
      get(dials[r]);
      if
      :: dial[AT(r, me)] -> expected++
      :: else -> problem = 1
      fi;
#endif
      r++
    :: else -> break
    od;
    /* 4, 5 */
    do
    :: atomic { expected > 0 -> skip }; welcome(); expected--
    :: else -> r = 0; break
    od;
#if BREAK != ANSWER_AWAITED_FIRST
    do
    :: atomic { r < me && dial[AT(me, r)] -> skip }; take_answer(); r++
    :: atomic { r < me && !dial[AT(me, r)] -> r++ }
    :: else -> r = 0; break
    od;
#endif
    /* 6 */
    outcome[me] = (problem -> apart : shared);
#if BREAK != NO_OUTCOMES
    do
    :: atomic { r < RANKS -> skip }; get(outcome[r] != unknown);
      atomic { problem = problem || outcome[r] == apart; r++ }
    :: else -> break
    od;
#endif
    atomic {
      listens[me] = 0;
      ended[me] = (problem -> has_parted : has_shared);
      assert(fault || problem == unreachable);
      check_end();
      goto gone
    };
fails:
    assert(fault);
    trouble = true;
    atomic { listens[me] = 0; ended[me] = has_failed }
gone:
    skip
  } unless {
    dead[me]
  }
}

#ifdef CRASH
proctype Crash() {
  byte victim;
  select(victim : 0 .. (RANKS - 1));
  atomic { fault = true; dead[victim] = 1; listens[victim] = 0 }
}
#endif

#ifdef STRANGER
proctype Stranger() {
  byte host;
  select(host : 0 .. (RANKS - 1));
  atomic {
    if
    :: listens[host] -> strangers[host] = 1
    :: else
    fi
  }
}
#endif


init {
  byte from, to;
  atomic {
    for (from : 1 .. (RANKS - 1)) {
      for (to : 0 .. (from - 1)) {
        if
        :: reaches[AT(from, to)] = 1
        :: unreachable = 1
        fi
      }
    };
    for (from : 0 .. (RANKS - 1)) { run Rank(from) };
    from = 0;
    to = 0;
#ifdef CRASH
    run Crash();
#endif
#ifdef STRANGER
    run Stranger()
#endif
  }
}
