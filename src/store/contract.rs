//! The promises of [`Store`](super::Store), each as one case. One list, run on every store.
//!
//! A case takes a store that is fresh, and uses nothing but the trait, so it holds for any store. Locks and retentions of
//! no length at all stand for those that ran out: nothing here sleeps.

mod conditions;
mod keeping;
mod purging;
mod randomized;
mod vocabulary;

use std::{path::Path, sync::Arc};

use super::{DatabaseUrl, OpenOptions, Store, cached::Cached, grouped::Grouped, open, postgres::settings::Scope};

/// Runs every case on every store, and on every wrapper around them.
macro_rules! suite {
    ($($module:ident :: $case:ident),* $(,)?) => {
        suite!(@store postgres, super::fresh_postgres(), $($module::$case),*);
        suite!(@store sqlite_file, super::fresh_sqlite_file(), $($module::$case),*);
        suite!(@store sqlite_memory, super::fresh_sqlite_memory(), $($module::$case),*);
        suite!(@store grouped_postgres, super::grouped(super::fresh_postgres()), $($module::$case),*);
        suite!(@store grouped_sqlite, super::grouped(super::fresh_sqlite_file()), $($module::$case),*);
        suite!(@store cached_postgres, super::cached(super::grouped(super::fresh_postgres())), $($module::$case),*);
        suite!(@store cached_sqlite, super::cached(super::grouped(super::fresh_sqlite_file())), $($module::$case),*);
    };
    (@store $store:ident, $fresh:expr, $($module:ident :: $case:ident),*) => {
        mod $store {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let fresh = $fresh.await;
                    super::$module::$case(fresh.store.clone()).await;
                    fresh.store.close().await;
                }
            )*
        }
    };
}

suite! {
    conditions::an_insert_takes_where_there_is_no_record,
    conditions::an_insert_never_replaces_a_record,
    conditions::of_64_inserts_exactly_one_takes,
    conditions::a_holders_write_takes_only_for_the_token_in_progress,
    conditions::a_seen_write_takes_only_on_the_version_that_was_loaded,
    conditions::of_64_takeovers_exactly_one_takes,
    conditions::a_takeover_and_a_completion_never_both_take,
    conditions::a_takeover_and_a_renewal_never_both_take,
    conditions::a_resolution_and_a_completion_never_both_take,
    conditions::replacements_of_an_expired_record_never_both_take,
    conditions::a_record_that_was_purged_and_inserted_again_is_not_the_one_that_was_loaded,
    purging::an_insert_and_a_purge_leave_one_record_or_none,
    conditions::fences_grow_across_takeover_replacement_and_deletion,
    purging::a_purge_deletes_only_what_expired_before_the_grace,
    purging::a_purge_is_limited_and_goes_on_where_it_left_off,
    purging::a_purge_never_deletes_what_was_renewed_or_reserved_anew,
    purging::a_record_that_finished_early_is_deleted_once_it_is_due,
    purging::purges_at_once_delete_each_record_once,
    purging::a_record_that_is_to_be_held_is_never_purged,
    keeping::writes_of_one_call_are_answered_in_order_and_apart,
    keeping::a_load_answers_in_order_and_knows_what_is_not_there,
    keeping::every_text_and_byte_comes_back_as_it_was_stored,
    keeping::keys_at_their_longest_are_stored,
    keeping::the_largest_result_is_stored,
    keeping::callers_that_leave_leave_nothing_half_done,
    keeping::a_store_that_is_closed_refuses,
    keeping::a_check_answers_until_the_store_is_closed,
    randomized::every_write_does_what_it_means,
}

/// A store with nothing in it, and what has to outlive it.
struct Fresh {
    store: Arc<dyn Store>,
    _folder: Option<tempfile::TempDir>,
}

/// How tests open a store.
pub(super) fn options() -> OpenOptions {
    OpenOptions { connections: 8, migrate: true, allow_unsafe_durability: false, settings: Scope::Connection }
}

/// A database of its own with the tables made.
pub(super) async fn fresh_postgres_url() -> String {
    onceward_testing::database(|url| async move {
        super::migrate(&url.parse().unwrap()).await.unwrap();
    })
    .await
}

async fn opened(url: &str) -> Arc<dyn Store> {
    open(&url.parse::<DatabaseUrl>().unwrap(), &options()).await.unwrap()
}

async fn fresh_postgres() -> Fresh {
    Fresh { store: opened(&fresh_postgres_url().await).await, _folder: None }
}

async fn fresh_sqlite_file() -> Fresh {
    let folder = tempfile::tempdir().unwrap();
    Fresh { store: opened(&sqlite_url(folder.path())).await, _folder: Some(folder) }
}

async fn fresh_sqlite_memory() -> Fresh {
    Fresh { store: opened("sqlite::memory:").await, _folder: None }
}

async fn grouped(fresh: impl Future<Output = Fresh>) -> Fresh {
    let fresh = fresh.await;
    Fresh { store: Arc::new(Grouped::new(fresh.store, 2)), ..fresh }
}

async fn cached(fresh: impl Future<Output = Fresh>) -> Fresh {
    let fresh = fresh.await;
    Fresh { store: Arc::new(Cached::new(fresh.store, 1 << 20)), ..fresh }
}

pub(super) fn sqlite_url(folder: &Path) -> String {
    format!("sqlite:{}", folder.join("onceward.db").display())
}
