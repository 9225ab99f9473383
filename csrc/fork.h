// What threads share, across fork(): the child has the forking thread alone, so what another one holds locked at that
// moment would stay locked there for ever.
#pragma once
#ifdef __linux__
#include <pthread.h>
#endif

namespace torch_blocked {

// The forking thread holds Owner::instance(), which has lock() and unlock(), while the process forks. Of two owners the
// one that is locked first, where a thread locks both, is to be told of last.
template <class Owner>
void hold_in_forks() {
#ifdef __linux__
  const auto unlock = [] { Owner::instance().unlock(); };
  pthread_atfork([] { Owner::instance().lock(); }, unlock, unlock);
#endif
}

}  // namespace torch_blocked
